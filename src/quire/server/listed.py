"""One prompt or many, in the four ways that OpenAI's clients send them."""

from quire.core.errors import InvalidPrompt


def listed(prompts: str | list[str | int | list[int]], *, param: str, most: int) -> list[str | list[int]]:
    """One text, one list of ids, or a list of such."""
    if isinstance(prompts, str):
        return [prompts]
    if prompts and all(isinstance(item, int) for item in prompts):
        return [[item for item in prompts if isinstance(item, int)]]
    many = [item for item in prompts if not isinstance(item, int)]
    if not many or len(many) != len(prompts):
        raise InvalidPrompt(
            f"{param} must be a text, a list of token ids, or a list of such; not empty, and ids not beside texts.",
            param=param,
        )
    if len(many) > most:
        raise InvalidPrompt(f"There are {len(many)} prompts; a request may bring {most}.", param=param)
    return many

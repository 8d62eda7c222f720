"""A chat request of the offline API: its prompt, its grammar, and its output as text, reasoning and tool calls.

The server has the same over HTTP bodies (`server/chat`). Does not depend on the engine.
"""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from quire.core.errors import InvalidParameter, shown
from quire.core.sampling import Grammar, GrammarKind, SamplingParams, SchemaClass, json_grammar
from quire.engine.model_format import DeclaredTool, Message, ModelFormat, ToolChoice, check_tools
from quire.engine.outputs import CompletionOutput, FunctionCall
from quire.output_parsing.events import PlainText, ReasoningText, ToolArguments, ToolStart
from quire.text.chat_template import plain_messages, render
from quire.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What a chat has beside its messages."""

    tools: Sequence[DeclaredTool] = ()
    tool_choice: ToolChoice = ToolChoice()  # noqa: RUF009  a NamedTuple never changes
    grammar: Grammar | None = None  # of the answer, by response_format
    chat_template: str | None = None  # None: the model's
    template_variables: Mapping[str, object] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @property
    def callable_tools(self) -> Sequence[DeclaredTool]:
        return () if self.tool_choice.mode == "none" else self.tools


def chat_options(
    *,
    tools: Sequence[DeclaredTool] | None = None,
    tool_choice: str | Mapping[str, object] | None = None,
    response_format: object = None,
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, object] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> ChatOptions:
    """The options of `LLM.chat`, checked. They have the names and forms of OpenAI's API and vLLM's `LLM.chat`."""
    if tools is not None and (not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools)):
        raise InvalidParameter(f"tools must be a list of objects, not {shown(tools)}.", param="tools")
    return ChatOptions(
        tools=tuple(tools or ()),
        tool_choice=_tool_choice(tools, tool_choice),
        grammar=_response_grammar(response_format),
        chat_template=chat_template,
        template_variables=dict(chat_template_kwargs or {}),
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
    )


def _tool_choice(tools: Sequence[DeclaredTool] | None, choice: str | Mapping[str, object] | None) -> ToolChoice:
    if not isinstance(choice, Mapping):
        return check_tools(tools, mode=choice)
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise InvalidParameter(
            "tool_choice may be 'none', 'auto', 'required' or "
            f'{{"type": "function", "function": {{"name": …}}}}, not {shown(choice)}.',
            param="tool_choice",
        )
    return check_tools(tools, name=name)


def _response_grammar(response_format: object) -> Grammar | None:
    """The grammar of OpenAI's `response_format`, or of a pydantic model in its place."""
    if response_format is None or isinstance(response_format, SchemaClass):
        return None if response_format is None else json_grammar(response_format, "response_format")
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    match kind:
        case "text":
            return None
        case "json_object":
            return Grammar(GrammarKind.JSON_OBJECT, "")
        case "json_schema":
            assert isinstance(response_format, Mapping)
            named = response_format.get("json_schema")
            schema = named.get("schema") if isinstance(named, Mapping) else None
            return json_grammar(schema, "response_format.json_schema.schema")
    raise InvalidParameter(
        'response_format must be a pydantic model, {"type": "json_schema", "json_schema": {"schema": …}}, '
        f'{{"type": "json_object"}} or {{"type": "text"}}, not {shown(response_format)}.',
        param="response_format",
    )


def render_chat(
    tokenizer: Tokenizer, model_format: ModelFormat, messages: Sequence[Message], options: ChatOptions
) -> str:
    """The text of the prompt."""
    tools = options.callable_tools
    return render(
        options.chat_template or tokenizer.chat_template,
        model_format.template_messages(plain_messages(messages), tools),
        add_generation_prompt=options.add_generation_prompt and not options.continue_final_message,
        continue_final_message=options.continue_final_message,
        tools=model_format.template_tools(tools) or None,
        named_tokens=tokenizer.named_tokens,
        extra=options.template_variables,
    )


def chat_params(params: SamplingParams, model_format: ModelFormat, options: ChatOptions, prompt: str) -> SamplingParams:
    """The parameters with the grammar of the output: of a forced call, of strict tools, or of the answer."""
    if params.grammar is not None and options.grammar is not None:
        raise InvalidParameter(
            "response_format and the grammar of sampling_params both constrain the output; give one of them.",
            param="response_format",
        )
    requested = options.grammar or params.grammar
    tools = options.callable_tools
    if not tools:
        return replace(params, grammar=requested)
    if options.tool_choice.mode != "auto":
        output = model_format.call_grammar(tools, options.tool_choice, parallel=True, prompt=prompt)
    else:
        output = model_format.answer_grammar(requested, tools, parallel=True, prompt=prompt)
    keeps = model_format.keeps_special_tokens(tools=True)
    return replace(params, grammar=output.grammar, skip_special_tokens=params.skip_special_tokens and not keeps)


def parse_chat(completion: CompletionOutput, model_format: ModelFormat, options: ChatOptions, prompt: str) -> None:
    """Split the text of an answer that may call tools: the text, the reasoning before it, the calls."""
    if not options.callable_tools:
        return
    parser = model_format.parser(tools=options.callable_tools, parallel=True, prompt=prompt)
    texts, reasoning = [], []
    calls: dict[int, FunctionCall] = {}
    for event in [*parser.push(completion.text), *parser.finish()]:
        match event:
            case PlainText(text):
                texts.append(text)
            case ReasoningText(text):
                reasoning.append(text)
            case ToolStart(index, name):
                calls[index] = FunctionCall(f"call_{uuid.uuid4().hex[:24]}", name, "")
            case ToolArguments(index, text):
                calls[index] = calls[index]._replace(arguments=calls[index].arguments + text)
    completion.text = "".join(texts)
    completion.reasoning = "".join(reasoning) or None
    completion.tool_calls = [calls[index] for index in sorted(calls)]

"""Simon Willison's `llm` command, told of the server by its file of further models."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from cases import ASK_PERSON, ASK_WEATHER, GREET, GREETING, KEY, MODEL, PERSON, URL, WEATHER, main, same

LLM = str(Path(sys.executable).with_name("llm"))
FOLDER = Path(tempfile.mkdtemp())
ENTRY = """\
- model_id: {id}
  model_name: {name}
  api_base: "{url}/v1"
  api_key_name: quire
  supports_schema: true
  supports_tools: true
"""
TOOLS = 'def get_weather(city: str) -> str:\n    "The weather of a city."\n    return "21"\n'


def llm(*arguments: str) -> str:
    environment = os.environ | {"LLM_USER_PATH": str(FOLDER)}
    done = subprocess.run([LLM, *arguments], env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return (done.stdout if done.returncode == 0 else done.stdout + done.stderr).strip()


def chat() -> None:
    same(llm("-m", "quire", "--no-stream", GREET), GREETING)


def stream() -> None:
    same(llm("-m", "quire", GREET), GREETING)


def tools() -> None:
    same(llm("-m", "quire", "--functions", TOOLS, ASK_WEATHER), WEATHER)


def json_schema() -> None:
    same(json.loads(llm("-m", "quire", "--schema", "name, age int", ASK_PERSON)), PERSON)


def errors() -> None:
    same("404" in llm("-m", "other", GREET), True)


if __name__ == "__main__":
    entries = [ENTRY.format(id=name, name=told, url=URL) for name, told in (("quire", MODEL), ("other", "other"))]
    (FOLDER / "extra-openai-models.yaml").write_text("".join(entries))
    (FOLDER / "keys.json").write_text(json.dumps({"quire": KEY}))
    main(chat, stream, tools, json_schema, errors)

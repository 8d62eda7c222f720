"""A FastAPI application with the engine in its own process: `python examples/fastapi_app.py`, then open /docs.

Threads may share an `LLM`: FastAPI runs plain `def` routes in a thread pool, and concurrent requests form one batch.
"""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field

from quire import LLM, SamplingParams


class Question(BaseModel):
    text: str
    max_tokens: int = Field(default=32, ge=1, le=256)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    with LLM() as llm:
        app.state.llm = llm
        yield


app = FastAPI(title="quire inside FastAPI", lifespan=lifespan)


@app.post("/ask")
def ask(question: Question) -> dict[str, object]:
    params = SamplingParams(temperature=0, max_tokens=question.max_tokens)
    (output,) = app.state.llm.chat([{"role": "user", "content": question.text}], params)
    return {"answer": output.outputs[0].text, "tokens": len(output.outputs[0].token_ids)}


@app.post("/stream")
def stream(question: Question) -> StreamingResponse:
    params = SamplingParams(temperature=0, max_tokens=question.max_tokens)

    def pieces() -> Iterator[str]:
        for delta in app.state.llm.stream_chat([{"role": "user", "content": question.text}], params):
            yield delta.text

    return StreamingResponse(pieces(), media_type="text/plain; charset=utf-8")


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=8080)

"""A FastAPI application with the engine in its own process: `python examples/fastapi_app.py`, then open /docs.

Concurrent requests form one batch. A client that goes away while its answer is streamed ends the request.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, Field

from quire import AsyncLLM, QuireError, SamplingParams


class Question(BaseModel):
    text: str
    max_tokens: int = Field(default=32, ge=1, le=256)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with AsyncLLM() as llm:
        app.state.llm = llm
        yield


app = FastAPI(title="quire inside FastAPI", lifespan=lifespan)


@app.exception_handler(QuireError)
async def refused(request: Request, error: QuireError) -> JSONResponse:
    """A question that is too long, for example: the error knows its status."""
    return JSONResponse({"error": error.message}, error.status)


@app.post("/ask")
async def ask(question: Question) -> dict[str, object]:
    params = SamplingParams(temperature=0, max_tokens=question.max_tokens)
    (output,) = await app.state.llm.chat([{"role": "user", "content": question.text}], params)
    return {"answer": output.outputs[0].text, "tokens": len(output.outputs[0].token_ids)}


@app.post("/stream")
async def stream(question: Question) -> StreamingResponse:
    params = SamplingParams(temperature=0, max_tokens=question.max_tokens)

    async def pieces() -> AsyncIterator[str]:
        async for delta in app.state.llm.stream_chat([{"role": "user", "content": question.text}], params):
            yield delta.text

    return StreamingResponse(pieces(), media_type="text/plain; charset=utf-8")


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=8080)

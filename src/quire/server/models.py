"""What is served, for those who ask: models and version."""

from starlette.requests import Request
from starlette.responses import Response

from quire.server.desk import Desk
from quire.server.edge import json_response
from quire.server.served import Served
from quire.version import __version__


async def models(desk: Desk, request: Request) -> Response:
    return json_response({"object": "list", "data": [_card(desk.served, name) for name in desk.served.names]})


async def model(desk: Desk, request: Request) -> Response:
    name = request.path_params["name"]
    desk.served.check_model(name)
    return json_response(_card(desk.served, name))


async def version(desk: Desk, request: Request) -> Response:
    return json_response({"version": __version__})


def _card(served: Served, name: str) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": served.created,
        "owned_by": "quire",
        "root": served.name,
        "parent": None,
        "max_model_len": served.max_model_len,
    }

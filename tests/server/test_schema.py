"""schemathesis against the server's own description: valid and invalid requests, none of which is the server's fault."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import jsonschema
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.config import SchemathesisConfig

from tests.server.scripting import check_control, scripted
from tests.server.serving import Running, wait_until_at_rest

NUM_CASES = 20  # for each endpoint and each kind; `make test-chaos` makes it a thousand in all

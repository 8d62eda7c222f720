"""On what terms a request is served: what its body asks for, what its headers say, and what its key allows."""

from dataclasses import replace

from quire.core.errors import InvalidParameter
from quire.engine.terms import Terms
from quire.server.visit import Visit


def terms_for(visit: Visit | None, said: Terms) -> Terms:
    """The terms that a body asks for, with those of its headers and its key."""
    if visit is None:
        return said
    priority = said.priority if visit.priority is None else visit.priority
    timeout_s = said.timeout_s if visit.timeout_s is None else visit.timeout_s
    if not visit.identity.trusted and (priority != 0 or timeout_s is not None):
        name = "priority" if priority != 0 else "timeout_s"
        raise InvalidParameter(f"{name} is for keys that the operator trusts (see --api-key-file).", param=name)
    return replace(said, priority=priority, timeout_s=timeout_s, tenant=visit.identity.tenant)

"""Registration of a worker at the router: the message, and the call that sends it."""

from __future__ import annotations

import ssl
from typing import Literal, Self

import aiohttp
from pydantic import BaseModel, ConfigDict, field_validator, model_validator

from splitserve.api.api_keys import key_header
from splitserve.core.errors import ConfigError, WorkerUnavailableError
from splitserve.core.request import DisaggregationMode
from splitserve.router.addresses import connector, named
from splitserve.router.args import parse_url

_TIMEOUT = aiohttp.ClientTimeout(total=5.0)


class PDRegistryRequest(BaseModel):
    """Body of POST /register and POST /deregister."""

    model_config = ConfigDict(extra="ignore")

    mode: Literal["prefill", "decode", "null"]
    # URL at which the router reaches the worker, e.g. http://10.0.0.7:30000.
    registry_url: str
    # On prefill workers: port of the bootstrap server. The other roles have none.
    bootstrap_port: int | None = None

    @field_validator("registry_url")
    @classmethod
    def _is_url(cls, url: str) -> str:
        try:
            return parse_url(url)
        except ConfigError as error:
            raise ValueError(error.message) from None

    @model_validator(mode="after")
    def _port_fits_mode(self) -> Self:
        if self.mode == "prefill" and (self.bootstrap_port is None or not 0 < self.bootstrap_port < 65536):
            raise ValueError("a prefill worker must give its bootstrap_port, between 1 and 65535")
        if self.mode != "prefill" and self.bootstrap_port is not None:
            raise ValueError(f"a {self.mode} worker must not have a bootstrap_port: only prefill workers do")
        return self

    @property
    def role(self) -> DisaggregationMode:
        return DisaggregationMode(self.mode)


class WorkerOrder(BaseModel):
    """Body of POST /workers/drain and POST /workers/resume."""

    model_config = ConfigDict(extra="ignore")

    # URL as in GET /workers.
    url: str
    # On drain: move running requests to other workers now, instead of letting them finish.
    migrate: bool = False


async def register_disaggregation_server(
    mode: DisaggregationMode,
    server_port: int,
    bootstrap_port: int | None,
    pdlb_url: str,
    host: str = "127.0.0.1",
    api_key: str | None = None,
    address: str | None = None,
    tls: ssl.SSLContext | None = None,
    scheme: str = "http",
) -> None:
    """Register the worker at `host`:`server_port` with the router at `pdlb_url`. Repeating it is harmless.

    `api_key`: an operator's key, if the router has keys. `address`: IP address of the router's name to connect to.
    None: any of its addresses. `tls`: for a router at an https URL. None: the system's trusted certificates. `scheme`:
    of the worker's URL, http or https.

    Raises WorkerUnavailableError if the router does not answer or rejects the registration.
    """
    await _post(pdlb_url, "/register", _request(mode, host, server_port, bootstrap_port, scheme), api_key, address, tls)


async def deregister_disaggregation_server(
    mode: DisaggregationMode,
    server_port: int,
    bootstrap_port: int | None,
    pdlb_url: str,
    host: str = "127.0.0.1",
    api_key: str | None = None,
    address: str | None = None,
    tls: ssl.SSLContext | None = None,
    scheme: str = "http",
) -> None:
    """Remove the worker from the router. Arguments and errors are those of `register_disaggregation_server`."""
    await _post(
        pdlb_url, "/deregister", _request(mode, host, server_port, bootstrap_port, scheme), api_key, address, tls
    )


def _request(
    mode: DisaggregationMode, host: str, port: int, bootstrap_port: int | None, scheme: str
) -> PDRegistryRequest:
    return PDRegistryRequest(mode=mode.value, registry_url=f"{scheme}://{host}:{port}", bootstrap_port=bootstrap_port)


async def _post(
    router_url: str,
    path: str,
    request: PDRegistryRequest,
    api_key: str | None,
    address: str | None,
    tls: ssl.SSLContext | None,
) -> None:
    try:
        async with (
            aiohttp.ClientSession(timeout=_TIMEOUT, connector=connector(address, tls)) as session,
            session.post(
                router_url.rstrip("/") + path, json=request.model_dump(), headers=key_header(api_key)
            ) as response,
        ):
            if response.status == 200:
                return
            reason = f"answered {response.status}: {(await response.text())[:300]}"
            option = "--router-key-file" if response.status in (401, 403) else "--router"
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        reason, option = f"does not answer ({error or type(error).__name__})", "--router"
    raise WorkerUnavailableError(f"the router {named(router_url, address)} {reason}: check {option}")

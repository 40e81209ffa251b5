"""What stands between the page and other pages of the same browser: only this machine, only this origin, only small requests.

A page of another site may send requests to 127.0.0.1, and may rebind its own name to it: Host and Origin are compared with the
address that the page is served at. Nothing is loaded from elsewhere (Content-Security-Policy).
"""

from __future__ import annotations

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LARGEST = 64 * 1024  # bytes of a request
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


class Guard:
    """An ASGI application behind checks. hosts: names and ports that the page is served at."""

    def __init__(self, app: ASGIApp, hosts: frozenset[str]) -> None:
        self.app, self.hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse, or hand on and add headers to the answer."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        refused = self._refused(Headers(scope=scope), scope["method"])
        if refused is not None:
            await PlainTextResponse(refused[1], refused[0], headers=HEADERS)(scope, receive, send)
            return
        body = await _body(receive)
        if body is None:
            await PlainTextResponse(f"more than {LARGEST:,} bytes", 413, headers=HEADERS)(scope, receive, send)
            return
        whole: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def received() -> Message:
            return whole.pop() if whole else await receive()

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
            await send(message)

        await self.app(scope, received, with_headers)

    def _refused(self, headers: Headers, method: str) -> tuple[int, str] | None:
        """Status and reason, where a request is refused."""
        if headers.get("host", "") not in self.hosts:
            return 421, "this page is for this machine only"
        origin = headers.get("origin")
        if origin is not None and origin not in {f"http://{host}" for host in self.hosts}:
            return 403, "requests of other pages are refused"
        if method not in ("GET", "HEAD", "POST"):
            return 405, "GET and POST only"
        if method == "POST" and headers.get("content-type", "").partition(";")[0] != "application/json":
            return 415, "application/json only"
        length = headers.get("content-length", "0")
        if not length.isdigit() or int(length) > LARGEST:
            return 413, f"more than {LARGEST:,} bytes"
        return None


async def _body(receive: Receive) -> bytes | None:
    """The whole body; None where it is too large, whatever its length was said to be."""
    body = bytearray()
    while True:
        message = await receive()
        body += message.get("body", b"")
        if len(body) > LARGEST:
            return None
        if not message.get("more_body", False):
            return bytes(body)

"""A server of the Model Context Protocol with two tools: `python mcp_server.py` on its pipes, `python mcp_server.py PORT`
over HTTP."""

from __future__ import annotations

import sys
from typing import Any

from mcp.server import MCPServer  # pyright: ignore[reportMissingImports]
from mcp.types import ImageContent, TextContent  # pyright: ignore[reportMissingImports]

server: Any = MCPServer("weather")


@server.tool()
def weather(city: str) -> str:
    """The weather of a city."""
    if city == "Nowhere":
        raise ValueError("no such city")
    return f"rain in {city}"


@server.tool()
def picture() -> list[ImageContent | TextContent]:
    """Of the weather."""
    return [ImageContent(type="image", data="aGk=", mime_type="image/png"), TextContent(type="text", text="")]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run(transport="streamable-http", port=int(sys.argv[1]))
    else:
        server.run()

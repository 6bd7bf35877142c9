"""`epd`: embeds files, looks over the machine, starts the service."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import epd


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status. Each command's own imports wait until it is asked for."""
    options = _parser().parse_args(arguments)
    if options.command == "embed":
        from epd.cli.embed import run as run_embed

        return run_embed(options)
    if options.command == "doctor":
        from epd.cli.doctor import run as run_doctor

        return run_doctor(options)
    from epd.cli.serve import run as run_serve

    return run_serve(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="epd", description="Multimodal embeddings.")
    parser.add_argument("--version", action="version", version=f"epd {epd.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    embed = commands.add_parser("embed", help="embed files, and rank them by a query")
    embed.add_argument("files", nargs="+", metavar="FILE", help="pictures, text files, or folders of them")
    embed.add_argument("--query", metavar="TEXT", help="rank the files by how well they fit this text")
    embed.add_argument("--instruction", metavar="TEXT", help="what the vectors are for")
    embed.add_argument("--dimensions", type=int, metavar="N", help="leading values to keep")
    embed.add_argument("--out", metavar="FILE.npz", help="save `vectors` [n, dimensions] and `files` there")
    embed.add_argument("--top", type=int, default=10, metavar="N", help="with --query: how many to print")
    embed.add_argument("--batch-size", type=int, default=16, metavar="N", help="files in one request")
    embed.add_argument("--url", default="http://127.0.0.1:8000", help="a running service")
    embed.add_argument(
        "--key-env", default="EPD_API_KEY", metavar="NAME", help="environment variable with the API key"
    )
    embed.add_argument("--local", action="store_true", help="embed in this process instead of a service")
    embed.add_argument("--model", default="demo", help="with --local: a folder, a hub id, or `demo`")

    commands.add_parser("doctor", help="say what this machine has and lacks")

    serve = commands.add_parser("serve", help="start the service on this host")
    serve.add_argument("config", nargs="?", help="a Serve config file; default: the one in this package")
    serve.add_argument(
        "--haproxy",
        action="store_true",
        help="HAProxy in place of Serve's own proxy: more small requests a second; its ports 8404 and 9101 "
        "listen on all addresses",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())

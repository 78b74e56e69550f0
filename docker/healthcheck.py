"""Exits 0 when the server in this container answers /health, 1 when it does not (yet)."""

from __future__ import annotations

import os
import sys
import urllib.error
import urllib.request


def healthy(port: str) -> bool:
    """Whether http://127.0.0.1:port/health answers 200 within five seconds."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as response:
            return response.status == 200
    except (urllib.error.URLError, OSError):
        return False


if __name__ == "__main__":
    sys.exit(0 if healthy(os.environ.get("PORT", "30000")) else 1)

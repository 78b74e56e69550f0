"""POST /generate, in SGLang's own form."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from inkling_rocm.engine.request import SamplingParams, TokenLogprob, Update
from inkling_rocm.server.backend import Handle

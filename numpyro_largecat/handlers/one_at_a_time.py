# SPDX-License-Identifier: Apache-2.0
"""A lock, so that models of several threads do not see each other's handlers."""

from __future__ import annotations

import threading

# NumPyro keeps the handlers in use in one stack, that of all threads: a model that ran beside
# another would be changed by the handlers around that. Programs that are compiled run no model.
MODEL_RUNS = threading.RLock()

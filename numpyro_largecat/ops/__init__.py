# SPDX-License-Identifier: Apache-2.0
"""Array functions: the mathematics, in JAX alone."""

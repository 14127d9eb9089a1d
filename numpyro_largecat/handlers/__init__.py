# SPDX-License-Identifier: Apache-2.0
"""All that the package knows of NumPyro's messages and of the privates of NumPyro and JAX."""

# SPDX-License-Identifier: Apache-2.0
"""Topic models, learnt in closed form."""

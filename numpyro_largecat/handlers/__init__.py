# SPDX-License-Identifier: Apache-2.0
"""All that the package knows of NumPyro's messages and of the privates of NumPyro and JAX.

What plates and handlers say to each other is in ``plate_facts``, what a site is in ``sites``, and
how a model is run to learn its sites in ``run_model``. ``shared_rows`` makes model and guide touch
the same rows, which ``touched_rows`` describes; ``chosen_rows`` makes plates hold rows of our
choice. Whatever may move with a new version of NumPyro or JAX is in ``internals``.
"""

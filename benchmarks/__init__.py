# SPDX-License-Identifier: Apache-2.0
"""Measurements that a user can repeat: ``python -m benchmarks.NAME [--json OUT] [--quick]``.

Each prints a table for people. ``--json`` also writes a list of records for programs: one for each
measured cell, with the fields of ``records.Record``, and one with the machine, the versions and the
date. ``--quick`` shows within a minute that a benchmark works; its figures mean nothing.
"""

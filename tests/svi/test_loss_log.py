# SPDX-License-Identifier: Apache-2.0
"""What the bar of a fit says."""

from __future__ import annotations

import numpy as np

from numpyro_largecat.svi.loss_log import LossLog


def test_the_time_before_the_first_losses_is_not_that_of_steps(capsys, monkeypatch):
    """There code is compiled, which takes longer than many steps."""
    now = 0.0
    log = LossLog(1_000, progress_bar=True, skip_bad_steps=False)
    monkeypatch.setattr(log.bar, "_time", lambda: now)
    log.bar.start_t = log.bar.last_print_t = now
    with log:
        assert "new code is compiled" in capsys.readouterr().err
        now = 5_000.0
        log.add(np.ones(1))
        now = 5_010.0
        log.add(np.ones(99))
        assert log.bar.format_dict["elapsed"] == 10
        assert log.bar.postfix == "smoothed ELBO -1"

# SPDX-License-Identifier: Apache-2.0
"""A fit on arguments of its model, and all that can be read of it there."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax import Array
from jax.typing import ArrayLike

from numpyro_largecat._checks import check_count, check_integers, check_random_key
from numpyro_largecat.reading import diagnosis, predictions
from numpyro_largecat.reading.bound_fit import BoundFit
from numpyro_largecat.reading.chunked_utilities import ChunkedUtilities
from numpyro_largecat.reading.diagnosis import Training
from numpyro_largecat.reading.eligible_classes import eligible_classes
from numpyro_largecat.reading.findings import Diagnosis
from numpyro_largecat.reading.predictions import TopClasses
from numpyro_largecat.reading.to_arviz import to_arviz
from numpyro_largecat.svi.array_batches import ArrayBatches


class Reading:
    """A fit on arguments of its model, as ``lc.Fitted.on`` gives it.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> import numpyro_largecat as lc
        >>> from numpyro.infer.autoguide import AutoNormal
        >>> def model(y=None):
        ...     with lc.class_plate("classes", 4, y, num_sampled=2) as classes:
        ...         b = numpyro.sample("b", dist.Normal(0, 1))
        ...     with lc.data_plate("data", 1) as rows:
        ...         lc.sample_choice("y", b[None], classes=classes, rows=rows, obs=y)
        >>> y, guide = jnp.array([2]), AutoNormal(model)
        >>> _ = numpyro.handlers.seed(guide, 0)(y)
        >>> loc, scale = jnp.array([0.0, 0.0, 5.0, 0.0]), jnp.ones(4)
        >>> new = lc.Fitted(model, guide, {"b_auto_loc": loc, "b_auto_scale": scale}).on()
        >>> new.top_classes(1).classes.tolist()
        [[2]]
        >>> jnp.exp(new.log_likelihood(y)).item()  # at the centre: too sure
        0.98...
        >>> jnp.exp(new.log_predictive(y, rng_key=jax.random.key(0), num_draws=16)).item()
        0.94...
        >>> new.draw_choices(rng_key=jax.random.key(1), num_draws=3).tolist()
        [[2], [2], [2]]
    """

    def __init__(self, fit: BoundFit, training: Training) -> None:
        self._fit, self._training = fit, training

    def _warn_of_proposal(self) -> None:
        """Say that rows which the loss weighs are wider here than their posterior."""
        if self._training.weighs_rows:
            message = (
                "the loss of this fit weighs draws of rows, for which the guide has a proposal, "
                "wider than their posterior; so is what is read here of these rows. Draw them by "
                "`lc.weighted_posterior`."
            )
            warnings.warn(message, UserWarning, stacklevel=3)

    def top_classes(
        self,
        num_top: int = 10,
        *,
        exclude: ArrayLike | None = None,
        among: ArrayLike | None = None,
        rng_key: Array | None = None,
        num_draws: int | None = None,
    ) -> TopClasses:
        r"""Find the most probable classes of each observation, exactly, over all K.

        With the utilities psi at the centre of the guide

        .. math:: p(k) = \exp \psi_k \Big/ \sum_{j=1}^{K} \exp \psi_j ,

        where the sum is accumulated over chunks of classes. Over T draws it is the mean of this
        probability, the posterior predictive. For other errors than Gumbel's each probability is an
        integral. The order at the centre is then that of the utilities; over draws the 4
        ``num_top`` classes with the highest mean softmax are tried, and the best of these returned.
        Draws are of the utilities where these are Gaussian, as ``log_predictive`` has them; then
        the 4 ``num_top`` classes with the highest mean plus one to two standard deviations are
        tried, and probabilities of all classes sum to 1 up to the noise of the draws.

        Shapes: (..., num_top), where ``...`` is the shape of the choice.

        Cost: one pass over the classes, also with draws of utilities alone, which takes a second
        product, or two passes as ``log_predictive``, and two with lists of more classes than an
        eighth of ``chunk_size``. With other draws 2 T passes, T + 1 if what is outside of the class
        plate is drawn besides utilities. For other errors 4 ``num_top`` integrals for each
        observation and draw. Lists of R classes cost O(R) for each observation and chunk, and for
        each class that is tried.

        Args:
            num_top: Number of most probable classes, in [1, K].
            exclude: Classes that are not named for an observation, such as the items that a user
                has: integers in [0, K), shape (..., R), where shorter lists are padded with -1.
            among: Classes of which alone those of an observation are named, shape (..., C), padded
                likewise. Probabilities stay those among all K classes.
            rng_key: A JAX random key, for draws.
            num_draws: Number of draws T from the guide. None for its centre.

        Returns:
            Classes and their log probabilities. Where fewer than ``num_top`` classes may be named
            or are possible, the others are -1, of log probability -inf; NaN in rows where none is
            possible.

        Raises:
            ValueError: If ``num_top`` is out of range, only one of ``rng_key`` and ``num_draws``
                is given, a list has another shape or holds what is no class (under ``jit``, where
                values are not known, no class is then named), or as ``Fitted``.
            TypeError: If lists are not integers.

        Example:
            See ``lc.Fitted``. Over draws:
            ``fitted.on(x).top_classes(5, rng_key=jax.random.key(1), num_draws=50)``.
        """
        self._warn_of_proposal()
        utilities = ChunkedUtilities.of(self._fit, is_drawn=rng_key is not None)
        classes = utilities.num_categories
        num_top = check_count("num_top", num_top, 1, classes, "number of classes")
        eligible = eligible_classes(exclude, among, utilities.batch_shape, classes)
        return predictions.top_classes(utilities, num_top, _draw_keys(rng_key, num_draws), eligible)

    def log_likelihood(
        self, obs: ArrayLike, *, rng_key: Array | None = None, num_draws: int | None = None
    ) -> Array:
        r"""Exact log probability of observed choices, over all K classes.

        .. math:: \log p(y \mid x, \theta) = \psi_y - \log \sum_{k=1}^{K} \exp \psi_k ,

        or the integral of other errors, with theta the centre of the guide, or each draw. The log
        of the mean over draws, ``logsumexp(result, 0) - log(num_draws)``, is the log predictive
        density. It is 0 where the model masks the choice, as in NumPyro.

        Shapes: (...) at the centre, (num_draws, ...) over draws, for choices of shape ``...``.

        Cost: one pass over the classes for each draw.

        Args:
            obs: Observed classes, integers in [0, K), shape (...).
            rng_key: A JAX random key, for draws.
            num_draws: Number of draws from the guide. None for its centre.

        Raises:
            ValueError: If ``obs`` has another shape than the choice or is out of range (under
                ``jit``, where values are not known, the log probability is then NaN), or as
                ``top_classes``.
            TypeError: If ``obs`` are not integers.
        """
        self._warn_of_proposal()
        utilities = ChunkedUtilities.of(self._fit, is_drawn=rng_key is not None)
        labels = predictions.labels_of_rows(obs, utilities)
        return predictions.log_likelihood(utilities, labels, _draw_keys(rng_key, num_draws))

    def log_predictive(self, obs: ArrayLike, *, rng_key: Array, num_draws: int) -> Array:
        r"""Log posterior predictive of observed choices, over all K classes.

        .. math:: \log p(y \mid x) = \log E_{q(\theta)} \, p(y \mid x, \theta)

        **By draws of utilities**, if these are Gaussian: the choice is a softmax; in the class
        plate the guide draws all sites from Normal distributions, as ``AutoNormal`` does and, with
        the covariance of each row, ``AutoRowNormal``, or holds them at a point; and utilities are
        affine in a class's own values, ``x @ w.T + b``, with the same slopes for all classes. Each
        draw is then of K utilities (above 32 draws, as many as the next prime that is 2 modulo 3),
        and that of the class itself is integrated out,

        .. math:: p(y \mid x) = E_{\psi_{-y}} E_{\psi_y} \,
            \sigma\Big(\psi_y - \log \sum_{k \neq y} e^{\psi_k}\Big) .

        The sum over the classes that are seldom chosen hardly varies: outside of the blocks of
        classes with the highest means, it is at its mean, unless in some row its variance is above
        1 / 16 ``num_draws`` of the square of the sum over all classes.

        8 such draws of 1,000 classes or more, or 16 of fewer, are about as close as 1,000 draws of
        the weights: the log is off by 0.01 to 0.03 (root mean square) where standard deviations of
        utilities are about 0.7, and by 0.05 to 0.1 where they are about 1.4. Wider ones take more.
        The integral is exact to 3e-4 for standard deviations up to 20; it is off by 0.1 at 50.

        **By draws of the latent sites** otherwise, such as with a guide of all rows together, or
        where a mask makes some utilities -inf. It takes some hundreds of them.

        Shapes: (...), for choices of shape ``...``.

        Cost: one pass over the classes, with two products of features and weights and two
        exponentials for each class, O(P) products more for the P values of one class's row, and
        O(``num_draws`` N) memory; with covariances of rows P products in place of the second, and
        O(P^2) memory for each class of a chunk. Where the sum of the rest varies too much, a second
        pass, with ``num_draws`` exponentials for each class. A pass for each draw if something
        outside of the class plate is drawn too, or by draws of the latent sites.

        Args:
            obs: Observed classes, integers in [0, K), shape (...).
            rng_key: A JAX random key.
            num_draws: Number of draws, at least 1.

        Raises:
            ValueError: As ``log_likelihood``.
            TypeError: If ``obs`` are not integers.

        References:
            McKay, Beckman and Conover, A Comparison of Three Methods for Selecting Values of Input
            Variables in the Analysis of Output from a Computer Code, 1979 (Latin hypercubes).
        """
        self._warn_of_proposal()
        keys = _split(rng_key, num_draws)
        utilities = ChunkedUtilities.of(self._fit, is_drawn=True)
        labels = predictions.labels_of_rows(obs, utilities)
        return predictions.log_predictive(utilities, labels, keys)

    def draw_choices(self, *, rng_key: Array, num_draws: int = 100) -> Array:
        r"""Draw choices from the posterior predictive, over all K classes.

        Each draw takes the latent sites from the guide, and then the class of highest noisy
        utility, ``argmax_k (psi_k + error_k)``, chunk of classes by chunk.

        Shapes: (num_draws, ...), for choices of shape ``...``; int32, and -1 where
        ``top_classes`` has no class.

        Cost: one pass over the classes for each draw, whatever the errors.

        Args:
            rng_key: A JAX random key.
            num_draws: Number of draws, at least 1.

        Raises:
            ValueError: As ``Fitted``.
        """
        self._warn_of_proposal()
        keys = _split(rng_key, num_draws)
        utilities = ChunkedUtilities.of(self._fit, is_drawn=True)
        return predictions.draw_choices(utilities, keys, utilities.batch_shape)

    def to_arviz(
        self,
        *,
        rng_key: Array,
        obs: ArrayLike | None = None,
        rows: Mapping[str, ArrayLike | Sequence[Any]] | None = None,
        coords: Mapping[str, Sequence[Any]] | None = None,
        dims: Mapping[str, Sequence[str]] | None = None,
        constant_data: Mapping[str, ArrayLike] | None = None,
        num_draws: int = 500,
    ) -> Any:
        """Draw from the guide and make an ArviZ object, of all small sites and the rows you name.

        Plates of at most 1000 rows are shown whole, unless ``rows`` names some. Of a site inside a
        larger plate, such as the weights of 10**6 classes, only the rows that ``rows`` names are
        drawn; if it names none, those of the ten classes that are most frequent in ``obs``, and
        without ``obs`` none. No large table is ever drawn whole. ``numpyro.deterministic`` sites
        are there where these rows are enough to know them: not those of data, nor what is computed
        over all rows of a table of which some are shown, or after rows are read by id from a plate
        that is shown.

        **With** ``obs``, the choices of the observations that the arguments of the model describe,
        there are also the groups ``log_likelihood``, exact and for each observation,
        ``posterior_predictive`` and ``observed_data``, from the same draws as ``posterior``. So
        ``az.loo``, ``az.compare`` and ``az.plot_ppc`` work. The arguments are then those of
        ``top_classes``, and may describe rows of the training data or others: the coordinate of a
        data plate holds the ids that it is given, and 0, 1, ... without. Labels among them do not
        stand for ``obs``: these groups, which take two passes over all classes for each draw, are
        there only where they are asked for.

        Shapes: the group ``posterior`` has variables of shape (1, num_draws, plates..., event...).
        The dimension of a plate has the plate's name, and its coordinate the names that ``coords``
        gives, else the row ids. The group ``constant_data`` holds what is given, and ``elbo``,
        shape (steps,), if the losses of the fit are known.

        Cost: O(num_draws * rows) time and memory; with ``obs`` two passes over the classes for each
        draw.

        Args:
            rng_key: A JAX random key.
            obs: Observed classes, integers in [0, K).
            rows: The rows to show of a plate, by id, such as ``{"classes": [17, 3]}``, or by label,
                if ``coords`` has one for each row of the plate.
            coords: Labels of dimensions, by name. For the dimension of a plate those of all its
                rows, or of the rows shown; with ``obs`` and without ids, those of ``obs``.
            dims: Names of the event dimensions of a site, such as ``{"w": ["feature"]}``; also of
                ``constant_data``, for all their dimensions.
            constant_data: Data to keep with the posterior, such as ``{"x": x}``.
            num_draws: Number of posterior draws.

        Returns:
            ``arviz.InferenceData`` with ArviZ 0.23, ``xarray.DataTree`` with ArviZ 1;
            ``save_netcdf`` writes both to a file.

        Raises:
            ValueError: If ``rows`` names an unknown plate or label, holds ids out of range or those
                of the plate of ``obs``; if ``coords`` names an unknown dimension or has too many or
                too few labels; if a parameter of the guide is missing, no site is left to show, or
                as ``log_likelihood``.

        Example:
            >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, optax
            >>> import numpyro_largecat as lc
            >>> from numpyro.infer import Trace_ELBO
            >>> from numpyro.infer.autoguide import AutoNormal
            >>> def model(y):
            ...     with lc.class_plate("classes", 1000, y, num_sampled=5) as classes:
            ...         b = numpyro.sample("b", dist.Normal(0, 1))
            ...     with numpyro.plate("data", 3):
            ...         numpyro.sample("y", lc.UtilityCategorical(b, classes), obs=y)
            >>> svi = lc.SubsampledSVI(model, AutoNormal(model), optax.adam(0.1), Trace_ELBO())
            >>> y = jnp.array([7, 7, 3])
            >>> result = svi.run(jax.random.key(0), 10, y, progress_bar=False)
            >>> data = lc.Fitted.from_svi(svi, result).on(y).to_arviz(
            ...     rng_key=jax.random.key(1), rows={"classes": [7, 3]},
            ...     coords={"classes": ["seven", "three"]})
            >>> data["posterior"]["b"].sel(classes="three").shape
            (1, 500)
        """
        self._warn_of_proposal()
        return to_arviz(
            self._fit,
            _split(rng_key, num_draws),
            obs,
            rows=rows or {},
            coords=coords or {},
            dims=dims or {},
            constant_data=constant_data or {},
            losses=self._training.losses,
        )

    def diagnose(
        self,
        *,
        rng_key: Array,
        batches: ArrayBatches | None = None,
        labels: ArrayLike | None = None,
        num_repeats: int = 30,
        num_draws: int = 200,
        num_rows: int = 1000,
    ) -> Diagnosis:
        r"""Look for what is wrong with a fit, since SVI always returns something.

        The arguments of the model have the observed choices here, those of one minibatch, unless
        ``batches`` are given. What only ``Fitted.from_svi`` knows is left out of a fit that was
        made from parameters: R-hats, but for that of the ELBO with ``losses``, and gradients. Of a
        model without choices there are these alone.

        - **R-hat of the ELBO** over four segments of the last half of its steps: well above 1 while
          the ELBO still rises. **R-hat of a parameter**: the same of up to 16 of its numbers that
          the fit recorded, in rows that its first batch touched, the median of those that moved. It
          is advised about if, where the guide has a standard deviation for it, it also moved by
          more than a tenth of that, or of its log, from the third quarter of the steps to the last.
        - **Bound below exact log likelihood**, in nats per observation of the batch, at the centre
          of the guide: :math:`\frac1B \sum_n \log p(y_n) - \bar b_n`, with the mean :math:`\bar b`
          of the bound over draws of classes. What is left when the local variables have converged
          is what the bound costs; more means that they lag.
        - **Gradient signal to noise** of each parameter,
          :math:`\|E g\|^2 / \mathrm{tr\,Var}\,g` over draws of latent values and classes for this
          batch, without bias: about 0, and possibly below, where nothing is left to learn from the
          batch.
        - **Pareto k** of parts of the guide, for the softmax: of all small sites together, and of
          the weights of each of 20 classes. A part a of the latent values is drawn from the guide,
          and the tail of its importance ratios tells how well its draws cover the model,

          .. math:: \log w(a) = E_{q(r)}[\log p(a, r, y) - \log q(a, r)],

          with the same 4 draws of the rest r for all draws of a. Below 0.7 the draws of a could be
          reweighted to the model's; above, the guide of a is too narrow, or lies elsewhere. All
          ratios are equal if q(a) is the best factor given the others. So k sees a fit that is not
          done, rows that were never visited, and a wrong shape; it does *not* see a guide that is
          too wide, nor dependence between parts, which a mean-field guide lacks. ``batches`` are
          needed, or all rows in the arguments: a class is compared on all rows of its own and on
          ``num_rows`` others, weighted to stand for all others, and k is NaN if these decide the
          ratios only up to noise.
        - **Sd over that of the best Gaussian**, of each small site (the least of its values) and of
          20 classes (the median of the mean of their values): the guide's standard deviation over
          that of the Gaussian which has the mean curvature of the model over the same draws, given
          the rest. Below 0.8 the guide lacks a covariance, or is not done; above 1.25 it is not
          done. Left out if ``num_draws`` are fewer than twice the products of two values.
        - **Sd of the log** of each positive small site: above 0.5 it may well be 0.
        - **Share of draws that u follows**, for each site that moves utilities around what the
          choice has as ``follow``, where classes are sampled: below 0.7 its sds are too small.
        - **Share of rows seen** where the prior of rows of the classes is learned and w is drawn
          around it: below a half, untouched rows pull the scale, see ``not_centred``. If that is
          the form, the **median of observations of a row**: from ten on the centred form learns the
          scale sooner.
        - **Classes seen**: how many of the K classes have labels, and how many equally frequent
          ones would have as high an entropy.

        Cost: ``num_repeats`` steps; O(K) time for each observation of the batch; and O(table) time
        and memory for the gradients. For Pareto k 4 passes over all classes with ``num_rows`` rows,
        and another 4 ``num_draws`` if the model has small sites, which form the utilities only if
        these sites move them.

        Args:
            rng_key: A JAX random key.
            batches: The ``ArrayBatches`` of the fit, whose arrays come after the arguments, as in
                ``run``.
            labels: All labels of the training data, for the classes seen; by default those of
                ``batches``, or of the batch.
            num_repeats: Draws of classes and latent values, at least 2.
            num_draws: Draws of each part of the guide for Pareto k and its standard deviations, at
                least 100; 0 leaves these out.
            num_rows: Rows, besides those of the classes looked at, for these.

        Returns:
            A ``Diagnosis``; print it.

        Raises:
            ValueError: If the model observes no such choice, and nothing is known of its steps; or
                if a number is too small.

        Example:
            >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, optax
            >>> import numpyro_largecat as lc
            >>> from numpyro.infer import TraceMeanField_ELBO
            >>> from numpyro.infer.autoguide import AutoNormal
            >>> def model(y, rows):
            ...     with lc.class_plate("classes", 50, y, num_sampled=5) as classes:
            ...         b = numpyro.sample("b", dist.Normal(0, 1))
            ...     with lc.data_plate("data", 90, rows) as rows:
            ...         psi = jnp.broadcast_to(b, (len(y), *b.shape))
            ...         lc.sample_choice("y", psi, classes=classes, rows=rows, obs=y)
            >>> guide, loss = AutoNormal(model), TraceMeanField_ELBO()
            >>> svi = lc.SubsampledSVI(model, guide, optax.adam(0.1), loss)
            >>> y, rows = jnp.arange(90) % 9, jnp.arange(90)
            >>> result = svi.run(jax.random.key(0), 300, y, rows, progress_bar=False)
            >>> batch = lc.Fitted.from_svi(svi, result).on(y, rows)
            >>> print(batch.diagnose(rng_key=jax.random.key(1), num_repeats=5, num_draws=0))
            R-hat of the ELBO ...
            classes seen, of 50                               9
            classes seen, effectively                         9

        References:
            Yao, Vehtari, Simpson and Gelman, Yes, but Did It Work?: Evaluating Variational
            Inference, 2018 (Pareto k). Dhaka, Catalina, Andersen, Magnusson, Huggins and Vehtari,
            Robust, Accurate Stochastic Optimization for Variational Inference, 2020 (R-hat of
            iterates).
        """
        check_random_key(rng_key)
        if labels is not None:
            check_integers("labels", labels)
        return diagnosis.diagnose(
            self._fit,
            self._training,
            rng_key,
            batches,
            labels,
            check_count("num_repeats", num_repeats, 2),
            check_count("num_draws", num_draws, 100) if num_draws else 0,
            check_count("num_rows", num_rows, 1),
        )


def _draw_keys(rng_key: Array | None, num_draws: int | None) -> Array | None:
    """One key for each draw, or None for the centre of the guide."""
    if (rng_key is None) != (num_draws is None):
        raise ValueError(
            "`rng_key` and `num_draws` belong together: give both, or none for the guide's centre."
        )
    return None if rng_key is None or num_draws is None else _split(rng_key, num_draws)


def _split(rng_key: Array, num_draws: int) -> Array:
    check_random_key(rng_key)
    return jax.random.split(rng_key, check_count("num_draws", num_draws, 1))

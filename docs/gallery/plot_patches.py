"""
What are natural images made of?
================================

A mixture of Gaussians over small patches of pictures: what its components look
like, and how its posterior takes noise out of a picture.

Real data: ``images/bsds300_gray_sub.npz``, arrays ``train`` and ``test`` of grey
pictures, (n, 321, 481), as of the `Berkeley Segmentation Data Set
<https://www2.eecs.berkeley.edu/Research/Projects/CS/vision/bsds/>`__. Without it we
draw pictures of discs that cover each other, whose statistics are much like those
of photographs.
"""

import os
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

import numpyro_largecat as lc

SIDE, NOISE = (
    8,
    25.0 / 255,
)  # of a patch in pixels, and sd of the noise that is added below

# %%
# The pictures
# ------------


def dead_leaves(size, rng, num_discs=400):
    """Discs of any size and grey, one over the other, with a little texture."""
    rows, columns = np.mgrid[:size, :size]
    picture = np.full((size, size), 0.5)
    for _ in range(num_discs):
        radius = 4 / np.sqrt(rng.uniform(0.005, 1))
        centre = rng.uniform(0, size, 2)
        inside = (rows - centre[0]) ** 2 + (columns - centre[1]) ** 2 < radius**2
        slope = 0.01 * (rows * rng.normal() + columns * rng.normal())
        picture = np.where(
            inside, rng.uniform(0.1, 0.9) + slope - slope[inside].mean(), picture
        )
    return (picture + 0.01 * rng.normal(size=picture.shape)).clip(0, 1)


path = (
    Path(os.environ.get("LARGECAT_DATA", "no folder"))
    / "images"
    / "bsds300_gray_sub.npz"
)
rng = np.random.default_rng(0)
if path.is_file():
    with np.load(path) as arrays:
        train, picture = arrays["train"] / 255, arrays["test"][3, :160, :160] / 255
    num_patches, num_components = 100_000, 200
else:
    train = np.array([dead_leaves(160, rng) for _ in range(12)])
    picture = dead_leaves(128, rng)
    num_patches, num_components = 20_000, 60


def patches_of(picture):
    """All patches of a picture, (n, pixels)."""
    return sliding_window_view(picture, (SIDE, SIDE)).reshape(-1, SIDE**2)


every = np.concatenate([patches_of(one)[::7] for one in train])
some = every[rng.permutation(len(every))[:num_patches]]
x = some - some.mean(axis=1, keepdims=True)  # brightness is no part of the model

# %%
# The mixture
# -----------
# Gaussians with mean 0 and any covariance; each patch belongs to at most 4 of them in
# a step. Fitted in closed form, without a learning rate.

family = lc.mixtures.ZeroMeanGaussianFamily(np.cov(x.T) + 1e-3 * np.eye(SIDE**2))
fit = lc.fit_mixture(
    jax.random.key(0),
    x.astype(np.float32),
    num_components=num_components,
    family=family,
    num_active=4,
    num_passes=10,
    batch_size=2_000,
    progress_bar=False,
)
one = lc.fit_mixture(
    jax.random.key(0),
    x.astype(np.float32),
    num_components=1,
    family=family,
    num_active=1,
    num_passes=2,
    batch_size=2_000,
    progress_bar=False,
)
print(
    f"log probability of a patch: {fit.score(x[:5_000]):.1f}; one Gaussian: "
    f"{one.score(x[:5_000]):.1f}"
)

# %%
# What are its components?
# ------------------------
# The first four eigenvectors of the covariances of some components: edges in many
# directions, flat regions, textures.

covariances = np.asarray(fit.components().covariance_matrix)
weights = np.asarray(fit.mixing().probs)
largest = np.argsort(-weights)[:24]
figure, grid = plt.subplots(4, 24, figsize=(11, 2.2))
for column, k in enumerate(largest):
    _, vectors = np.linalg.eigh(covariances[k])
    for row in range(4):
        axes = grid[row, column]
        axes.imshow(vectors[:, -1 - row].reshape(SIDE, SIDE), cmap="gray")
        axes.axis("off")
figure.tight_layout(pad=0.1)

# %%
# Taking noise out
# ----------------
# Of a noisy patch each component says which clean patch is most likely, ``C (C +
# s^2)^-1`` times it, and the posterior of the components says how much each counts.
# Every pixel is in many patches, whose answers are averaged.


def denoise(picture, covariances, weights):
    """The mean of all patches that a pixel is in."""
    patches = patches_of(picture)
    means = patches.mean(axis=1, keepdims=True)
    y = patches - means
    noisy = covariances + NOISE**2 * np.eye(SIDE**2)
    scores = []
    for weight, covariance in zip(weights, noisy, strict=True):
        factor = np.linalg.cholesky(covariance)
        z = np.linalg.solve(factor, y.T)
        scores.append(
            np.log(weight) - 0.5 * (z**2).sum(axis=0) - np.log(np.diag(factor)).sum()
        )
    shares = np.exp(np.array(scores) - np.max(scores, axis=0))
    shares /= shares.sum(axis=0)
    clean = np.zeros_like(y)
    for share, covariance, with_noise in zip(shares, covariances, noisy, strict=True):
        own = share > 0.01
        clean[own] += share[own, None] * (
            y[own] @ np.linalg.solve(with_noise, covariance)
        )
    total, count = np.zeros_like(picture), np.zeros_like(picture)
    height, width = (size - SIDE + 1 for size in picture.shape)
    clean = (clean + means).reshape(height, width, SIDE, SIDE)
    for i in range(SIDE):
        for j in range(SIDE):
            total[i : i + height, j : j + width] += clean[:, :, i, j]
            count[i : i + height, j : j + width] += 1
    return total / count


def decibels(found):
    return -10 * np.log10(np.mean((found - picture) ** 2))


noisy = picture + NOISE * rng.normal(size=picture.shape)
by_mixture = denoise(noisy, covariances, weights)
by_one = denoise(noisy, np.asarray(one.components().covariance_matrix), np.ones(1))
figure, grid = plt.subplots(1, 4, figsize=(11, 3.2))
pictures = {
    "clean": picture,
    "noisy": noisy,
    "one Gaussian": by_one,
    "mixture": by_mixture,
}
for axes, (name, found) in zip(grid, pictures.items(), strict=True):
    axes.imshow(found, cmap="gray", vmin=0, vmax=1)
    label = name if name == "clean" else f"{name}, {decibels(found):.1f} dB"
    axes.set_title(label, fontsize=10)
    axes.axis("off")
figure.tight_layout()

"""How strong players are, by who beat whom: intervals of a match, and ratings of many players."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

UNIT = math.log(10) / 400  # a rating that is 400 higher: ten points to one
NORMAL = 1.959964  # standard deviations to both sides that have 95 % of a normal distribution


class Interval(NamedTuple):
    """A share or a mean, and the ends of its 95 % confidence interval."""

    value: float
    low: float
    high: float


class Outcome(NamedTuple):
    """A match of two players as the first one sees it; shares are of all games."""

    games: int
    wins: Interval
    losses: Interval
    ties: Interval
    score: Interval  # a win is 1, a tie 1/2
    rating_difference: float  # on the scale of `ratings`, infinite if all points are one player's
    probability: float  # of wins and losses that differ as much or more, if both players are equally strong


def share(count: int, total: int) -> Interval:
    """A share with its Wilson interval, which is sound for few games and for shares of 0 and 1. Raises ValueError for a
    count outside of 0 to `total`, and for no games."""
    if not 0 <= count <= total or total < 1:
        raise ValueError(f"{count} of {total} games: give 0 to {total} of one game or more")
    p, z2 = count / total, NORMAL**2
    middle = p + z2 / (2 * total)
    half = NORMAL * math.sqrt(p * (1 - p) / total + z2 / (4 * total**2))
    scale = 1 + z2 / total
    return Interval(p, max((middle - half) / scale, 0.0), min((middle + half) / scale, 1.0))


def outcome(wins: int, losses: int, ties: int) -> Outcome:
    """What a match of so many games says. Raises ValueError without games."""
    games = wins + losses + ties
    shares = share(wins, games), share(losses, games), share(ties, games)
    mean = (wins + ties / 2) / games
    deviation = math.sqrt(max((wins + ties / 4) / games - mean**2, 0.0))
    half = NORMAL * deviation / math.sqrt(games)
    score = Interval(mean, max(mean - half, 0.0), min(mean + half, 1.0))
    difference = math.log(mean / (1 - mean)) / UNIT if 0 < mean < 1 else math.copysign(math.inf, mean - 0.5)
    return Outcome(games, *shares, score, difference, sign_test(wins, losses))


def sign_test(wins: int, losses: int) -> float:
    """The probability that of as many games without ties, each won by either player with probability 1/2, one player
    wins as many as the better one here, or more."""
    n, k = wins + losses, np.arange(min(wins, losses) + 1)
    log_factorials = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, n + 1)))])
    log_probabilities = log_factorials[n] - log_factorials[k] - log_factorials[n - k] - n * math.log(2)
    return min(2 * float(np.exp(log_probabilities).sum()), 1.0)


def ratings(points: np.ndarray) -> np.ndarray:
    """Ratings [N] of players, of whom i has won `points[i, j]` [N, N] against j; a tie is half a point for each.

    They are the most probable ones (Bradley and Terry 1952) after one more game of each player that ends in a tie, with
    a player of rating 0. So they are finite, unique, and the same in every order of the games. Raises ValueError for
    points that are negative, not finite or not square.
    """
    points = np.array(points, float)
    if (
        points.ndim != 2
        or points.shape[0] != points.shape[1]
        or not (points >= 0).all()
        or not np.isfinite(points).all()
    ):
        raise ValueError(f"points of shape {points.shape}: give a square of numbers of 0 or more")
    games, strength = points + points.T, np.zeros(len(points))

    def gradient(x: np.ndarray) -> np.ndarray:
        return (points - games * expected(x)).sum(1) + 0.5 - _logistic(x)

    def expected(x: np.ndarray) -> np.ndarray:
        return _logistic(x[:, None] - x[None, :])

    for _ in range(200):  # Newton's method on a concave function
        p, own = expected(strength), _logistic(strength)
        curvature = games * p * (1 - p)
        hessian = np.diag(curvature.sum(1) + own * (1 - own)) - curvature
        step = np.linalg.solve(hessian, gradient(strength))
        strength = strength + step / max(np.abs(step).max(initial=0), 1.0)  # far steps may go too far
        if np.abs(step).max(initial=0) < 1e-10:
            break
    return strength / UNIT


def _logistic(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.tanh(x / 2))

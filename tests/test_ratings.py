"""Intervals of a match and ratings of players."""

import math

import numpy as np
import pytest

from beast.population.ratings import UNIT, outcome, ratings, share, sign_test


def test_the_intervals_of_a_match_are_those_by_hand():
    # Sample Factory's duel of two policies (arXiv 2006.11751, section 4.3).
    found = outcome(wins=78, losses=3, ties=19)
    assert found.games == 100
    assert found.wins == pytest.approx((0.78, 0.689, 0.850), abs=5e-4)
    assert found.losses == pytest.approx((0.03, 0.010, 0.085), abs=5e-4)
    assert found.ties.value == 0.19
    assert found.score == pytest.approx((0.875, 0.875 - 0.049, 0.875 + 0.049), abs=5e-4)
    assert found.rating_difference == pytest.approx(338, abs=0.5)
    assert found.probability < 1e-15


def test_shares_of_nothing_and_of_all_have_intervals_within_0_and_1():
    assert share(0, 10) == pytest.approx((0, 0, 0.2775), abs=1e-4)
    assert share(10, 10) == pytest.approx((1, 0.7225, 1), abs=1e-4)
    assert outcome(0, 4, 0).score == (0, 0, 0) and outcome(0, 4, 0).rating_difference == -math.inf
    assert outcome(4, 0, 0).rating_difference == math.inf and outcome(0, 0, 5).rating_difference == 0
    for count, total in ((-1, 3), (4, 3), (0, 0)):
        with pytest.raises(ValueError, match=f"{count} of {total} games"):
            share(count, total)


def test_the_interval_of_a_share_has_it_95_times_of_100():
    random = np.random.default_rng(0)
    for p in (0.05, 0.5, 0.9):
        intervals = [share(int(count), 50) for count in random.binomial(50, p, size=4000)]
        covered = np.mean([low <= p <= high for _, low, high in intervals])
        assert 0.93 < covered < 0.98


def test_the_sign_test_is_the_binomial_distributions():
    for wins, losses in ((0, 0), (1, 0), (5, 5), (3, 9), (9, 3), (60, 40)):
        n, fewer = wins + losses, min(wins, losses)
        tail = sum(math.comb(n, k) for k in range(fewer + 1)) / 2**n
        assert sign_test(wins, losses) == pytest.approx(min(2 * tail, 1.0))
    assert 0 < sign_test(40_000, 41_000) < 1e-3, "no overflow with many games"


def log_likelihood(points: np.ndarray, R: np.ndarray) -> float:
    def log_logistic(x):
        return -np.logaddexp(0, -x)

    x = UNIT * R
    pairs = sum(points[i, j] * log_logistic(x[i] - x[j]) for i in range(len(R)) for j in range(len(R)) if i != j)
    return pairs + 0.5 * sum(log_logistic(each) + log_logistic(-each) for each in x)


def test_ratings_are_those_by_hand_and_the_most_probable_ones():
    points = np.zeros((3, 3))
    for first, second, of_first, of_second in ((0, 1, 7.5, 2.5), (0, 2, 9, 1), (1, 2, 6, 4)):
        points[first, second], points[second, first] = of_first, of_second
    found = ratings(points)
    assert found == pytest.approx([175.6, -38.0, -129.8], abs=0.1)
    best, random = log_likelihood(points, found), np.random.default_rng(0)
    for scale in (1.0, 30.0, 300.0):
        for _ in range(50):
            assert log_likelihood(points, found + scale * random.normal(size=3)) < best


@pytest.mark.parametrize("seed", range(5))
def test_ratings_of_many_players_are_finite_and_found_whoever_is_named_first(seed):
    random = np.random.default_rng(seed)
    count = int(random.integers(2, 40))
    points = random.integers(0, 100, size=(count, count)) * (random.random((count, count)) < 0.3)
    points[0] = 100  # wins all of its games
    points[1:, 0] = 0
    found, order = ratings(points), random.permutation(count)
    assert np.isfinite(found).all() and found.argmax() == 0
    assert ratings(points[np.ix_(order, order)]) == pytest.approx(found[order], abs=1e-4)
    x = UNIT * found
    probability = 1 / (1 + np.exp(x[None, :] - x[:, None]))
    np.fill_diagonal(points, 0)
    won = points.sum(1) + 0.5  # as many points as are expected, the tie with the player of rating 0 included
    assert ((points + points.T) * probability).sum(1) + 1 / (1 + np.exp(-x)) == pytest.approx(won, abs=1e-5)


def test_who_has_not_played_has_a_rating_of_0_and_nonsense_is_refused():
    assert ratings(np.zeros((4, 4))) == pytest.approx(np.zeros(4))
    assert ratings(np.zeros((0, 0))).shape == (0,)
    for points in (np.zeros((2, 3)), -np.ones((2, 2)), np.full((2, 2), np.nan), np.zeros(4)):
        with pytest.raises(ValueError, match="give a square"):
            ratings(points)

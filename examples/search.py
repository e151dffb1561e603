"""Search for a learning rate and an entropy cost with Optuna: `python -m examples.search 20` (trials)."""

import sys

import optuna

from monobeast import Flags, train


def objective(trial: optuna.Trial) -> float:
    learning_rate = trial.suggest_float("learning_rate", 1e-4, 1e-2, log=True)
    entropy_cost = trial.suggest_float("entropy_cost", 1e-3, 1e-1, log=True)
    flags = Flags(env="CartPole-v1", total_steps=30_000, learning_rate=learning_rate, entropy_cost=entropy_cost)
    result = train(flags)
    if result.stopped_by:  # SIGTERM or SIGHUP: this trial is not done, and no other begins
        trial.study.stop()
        raise optuna.TrialPruned
    return result.mean_return


if __name__ == "__main__":
    if len(sys.argv) != 2 or not sys.argv[1].isdecimal():
        sys.exit("usage: python -m examples.search TRIALS")
    study = optuna.create_study(direction="maximize")
    study.optimize(objective, n_trials=int(sys.argv[1]))
    print(f"best mean return {study.best_value:.1f} with {study.best_params}")

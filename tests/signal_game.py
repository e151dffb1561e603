import toy_games

parallel_env = toy_games.Signal

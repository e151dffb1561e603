"""What learning code is made of: V-trace, distributions, recurrent cores, the learner's state, published weights."""

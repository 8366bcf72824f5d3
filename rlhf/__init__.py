"""One KL-regularised REINFORCE run over a task directory: data, models, training, evaluation."""

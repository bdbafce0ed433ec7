"""Write the log of a reinforcement-learning run once, and see it in every tracker."""

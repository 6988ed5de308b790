"""Other people's training scripts, under their own launcher and under srunddp."""

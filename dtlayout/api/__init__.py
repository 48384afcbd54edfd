"""Questions of the command line as functions, whose answers are values; and the pieces of training, joined."""

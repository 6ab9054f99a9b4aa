"""From a call to an answer: the one door, the models behind it and how their calls are scheduled."""

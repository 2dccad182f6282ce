"""Graph passes: from a Dynamo graph to a graph that computes every distinct prefix once (see `pipeline`)."""

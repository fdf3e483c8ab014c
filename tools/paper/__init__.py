"""Published tables as rows that can be predicted: reference/ turned into set-ups, one module a source."""

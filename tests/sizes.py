"""One table of sizes: all different, so that no two axes can be swapped."""

BATCH = 3
QUERY_LENGTH = 5
KEY_LENGTH = 7
NUM_HEADS = 4
NUM_KEY_VALUE_HEADS = 2
KEY_DIM = 6
VALUE_DIM = 8
MODEL_DIM = 24
INTERMEDIATE_DIM = 10
VOCABULARY_SIZE = 29

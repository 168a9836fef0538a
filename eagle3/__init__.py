"""EAGLE-3 drafter training: capture a target's features, train a draft head, measure its acceptance.

Letters in shape comments: B sequences, T tokens, D target hidden size, A captured layers (3), V target vocabulary,
W draft vocabulary, K training-time-test steps, R supervised rows, N rows of any kind.
"""

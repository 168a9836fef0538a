"""The contract between capture and training: samples, stores."""

"""The script starts its ranks itself, and names the place where they meet itself."""

from training import spawn

if __name__ == "__main__":
    spawn(join="tcp://127.0.0.1:{port}")

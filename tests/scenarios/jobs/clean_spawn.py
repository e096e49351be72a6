"""The script starts its ranks itself."""

from training import spawn

if __name__ == "__main__":
    spawn()

"""What the installed command runs: `main`, with Ctrl-C quiet from the first moment on."""

import signal


def main() -> None:
    """Run the command line. Until its modules are imported, Ctrl-C ends the process as it ends any other."""
    quiet = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if quiet:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from mooncake_connector.cli.main import main as run

    if quiet:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


if __name__ == "__main__":
    main()

"""What run.json says of itself. Apart, so that ``wrap`` starts a job before it loads what reads one."""

RUN_FORMAT = "ddpdoctor-run"
RUN_VERSION = 1

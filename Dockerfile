# ddpdoctor beside a job that it did not start: attach, analyze and check-env.
#
#     docker build . --tag ddpdoctor
#     docker run --rm -v "$PWD:/logs:ro" ddpdoctor analyze /logs/train.log
#     docker run --rm --pid host --cap-add SYS_PTRACE ddpdoctor attach
#     docker run --rm --gpus all --network host ddpdoctor check-env
#
# torch is its CPU build: the image runs no training. To train under `ddpdoctor wrap`, install ddpdoctor in the image of the job.
FROM python:3.12-slim AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY ddpdoctor ddpdoctor
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim
COPY constraints.txt /tmp/
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu torch==2.13.0 \
    && pip install --no-cache-dir -c /tmp/constraints.txt "$(echo /wheels/*.whl)[attach]" numpy \
    && rm -r /wheels /tmp/constraints.txt
WORKDIR /work
ENTRYPOINT ["ddpdoctor"]
CMD ["--help"]

# commlayer for servers and for homes without a GPU:
#   docker build -t commlayer .
# For GPUs build on an image that has torch for CUDA:
#   docker build -t commlayer --build-arg BASE=<image with torch for CUDA 12> --build-arg EXTRA="[gpu12]" .
# The default index serves torch with CUDA. For the small CPU build pass --build-arg PIP_EXTRA_INDEX_URL=<PyTorch's CPU index>.
ARG BASE=python:3.12-slim

FROM ${BASE} AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY pyproject.toml CMakeLists.txt README.md LICENSE ./
COPY commlayer commlayer
COPY native native
COPY cuda cuda
RUN COMMLAYER_REQUIRE_NATIVE=1 pip wheel --no-deps --wheel-dir /wheels .

FROM ${BASE}
ARG PIP_EXTRA_INDEX_URL=
ARG EXTRA=
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir "$(echo /wheels/*.whl)${EXTRA}" && rm -r /wheels
COPY examples /work/examples
WORKDIR /work
ENTRYPOINT ["commlayer"]
CMD ["demo", "--seconds", "20"]

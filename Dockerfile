# commlayer for servers and for homes without a GPU:
#   docker build -t commlayer .
# For GPUs build on an image that has torch for CUDA:
#   docker build -t commlayer --build-arg BASE=<image with torch for CUDA 12> --build-arg EXTRA="[gpu12]" .
# The default index serves torch with CUDA. For the small CPU build pass --build-arg PIP_EXTRA_INDEX_URL=<PyTorch's CPU index>.
# A tag can be given to another image; to rule that out, pass --build-arg BASE=python@sha256:<digest>.
ARG BASE=python:3.12.12-slim-bookworm

FROM ${BASE} AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY pyproject.toml CMakeLists.txt constraints.txt README.md LICENSE ./
COPY commlayer commlayer
COPY native native
COPY cuda cuda
# Older versions of pip take the first variable for build requirements, newer ones the second.
RUN PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt COMMLAYER_REQUIRE_NATIVE=1 \
    pip wheel --no-deps --wheel-dir /wheels .

FROM ${BASE}
ARG PIP_EXTRA_INDEX_URL=
ARG EXTRA=
COPY --from=build /wheels /wheels
COPY --from=build /source/constraints.txt /constraints.txt
RUN pip install --no-cache-dir -c /constraints.txt "$(echo /wheels/*.whl)${EXTRA}" && rm -r /wheels
# Keys and the working directory belong to the user that runs everything; a new volume at /keys takes its owner from here.
RUN useradd --create-home --uid 1000 commlayer && install -d -o commlayer -g commlayer /work /keys
USER commlayer
WORKDIR /work
COPY --chown=commlayer examples examples
ENTRYPOINT ["commlayer"]
CMD ["demo", "--seconds", "20"]

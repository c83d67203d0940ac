# docker build -t tunedcomm . && docker run --gpus all --rm tunedcomm
FROM python:3.12-slim
# Triton compiles its launchers with the C compiler.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /tunedcomm
COPY . .
RUN pip install --no-cache-dir .
CMD ["tunedcomm", "doctor"]

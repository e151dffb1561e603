# Trains Pong on the CPU, as `make train` does. Runs lie in the volume; the same line resumes, Ctrl-C saves and stops.
#
#     docker build -t beast .
#     docker run --init -it -v beast-runs:/beast/runs beast
#     docker run --init -it -v beast-runs:/beast/runs beast --mode test --name pong
#
# A run's meta.json has no commit here, as .git is left out of the image.
#
# For a GPU: docker build --build-arg TORCH_INDEX=https://pypi.org/simple …, and docker run --gpus all …
FROM python:3.11-slim

# Where torch comes from: this index has it without a GPU's libraries. pip prefers its builds to those of the same
# version elsewhere.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

WORKDIR /beast
COPY requirements.txt constraints.txt ./
RUN pip install --no-cache-dir --extra-index-url "$TORCH_INDEX" --requirement requirements.txt
COPY . .

VOLUME /beast/runs
ENTRYPOINT ["python", "monobeast.py"]
CMD ["--env", "PongNoFrameskip-v4", "--num_actors", "2", "--name", "pong"]

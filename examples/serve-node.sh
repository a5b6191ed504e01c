#!/bin/sh
# One host of `epx serve` on several hosts: run it once on every host by a launcher, which says how many there are and which this is.
#   serve-node.sh HOST:PORT OPTION...    HOST: an address of the launcher's first host, where the others join
# All need the same secret in EPX_JOIN_TOKEN. EPX: the program (epx). Node 0 answers HTTP.
#   mpirun -n 2 --map-by ppr:1:node -x EPX_JOIN_TOKEN examples/serve-node.sh node1:5000 --model-path DIR --tp 2 --dp 2 --enable-dp-attention
#   sbatch examples/serve.sbatch DIR     the same under Slurm
set -eu
rank=${OMPI_COMM_WORLD_RANK-${SLURM_PROCID-${PMI_RANK-}}}
size=${OMPI_COMM_WORLD_SIZE-${SLURM_NTASKS-${PMI_SIZE-}}}
if [ -z "$rank" ] || [ -z "$size" ]; then
    echo "serve-node.sh: no launcher: set by mpirun OMPI_COMM_WORLD_RANK and _SIZE or PMI_RANK and PMI_SIZE, by srun SLURM_PROCID and SLURM_NTASKS" >&2
    exit 2
fi
if [ $# -lt 2 ]; then
    echo "serve-node.sh: HOST:PORT and the options of epx serve are missing" >&2
    exit 2
fi
: "${EPX_JOIN_TOKEN:?a secret that all hosts share}"
address=$1
shift
exec "${EPX:-epx}" serve --nnodes "$size" --node-rank "$rank" --dist-init-addr "$address" "$@"

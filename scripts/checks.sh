# shellcheck shell=bash
# What the scripts share: their help, the end with one sentence, checks of numbers and switches, folders of their own.
# Sourced at the root of the repository.

# Python's words to start ranks on this machine alone: --nproc-per-node and a script follow. torchrun would have them meet
# at the name of the machine, and wait for minutes in a container, or behind a VPN, where that name leads nowhere.
# shellcheck disable=SC2034 # used where this is sourced
torchrun=(-m torch.distributed.run --standalone --local-addr localhost)

die() {
    echo "error: $*" >&2
    exit 1
}

# help_if_asked SCRIPT WORD...: if the first of its words is --help, print the comment at the head of SCRIPT, and end.
help_if_asked() {
    [[ ${2:-} == --help || ${2:-} == -h ]] || return 0
    awk 'NR > 1 && !/^#/ { exit } !/^#(!|SBATCH)/ { sub(/^# ?/, ""); print }' "$1"
    exit
}

# check_words SCRIPT MOST WORD...: SCRIPT has no options, and at most MOST words.
check_words() {
    local word
    for word in "${@:3}"; do
        [[ $word != -* ]] || die "$word is no argument of $1: bash $1 --help lists them."
    done
    (($# - 2 <= $2)) || die "${*:$#} is one word too many: bash $1 --help lists the arguments."
}

# check_numbers LARGEST NAME...: every variable holds an integer from 1 to LARGEST. Bash computes in 64 bits, which hold
# the product of three numbers below a million.
check_numbers() {
    local largest=$1 name value
    for name in "${@:2}"; do
        value=${!name}
        [[ $value =~ ^[1-9][0-9]*$ ]] || die "$name=$value is not a positive integer."
        if ((${#value} > ${#largest} || value > largest)); then
            die "$name=$value is too large: at most $largest."
        fi
    done
}

# check_switches NAME...: every variable is 0 or 1.
check_switches() {
    local name
    for name in "$@"; do
        [[ ${!name} == [01] ]] || die "$name=${!name} is neither 0 nor 1."
    done
}

# make_folder FOLDER NAME: make the folder; NAME is the variable that holds it, or what to call it.
make_folder() {
    { mkdir -p -- "$1" && [ -w "$1" ]; } 2>/dev/null || die "$2=$1 cannot be made or written: name another folder."
}

# own_folder FOLDER: make FOLDER and mark it as made by a script, which may empty or overwrite it. One that is there has
# to bear the mark, or be empty.
own_folder() {
    local mark=$1/.made-by-seq1f1b
    if [ -e "$1" ] && [ ! -e "$mark" ] && { [ ! -d "$1" ] || [ -n "$(ls -A -- "$1")" ]; }; then
        die "$1 exists and was not made by $0, which would overwrite what is in it: remove it, or name another."
    fi
    { mkdir -p -- "$1" && touch -- "$mark"; } 2>/dev/null || die "$1 cannot be made or written: name another folder."
}

# emptied_folder FOLDER: the same, and remove all but the mark.
emptied_folder() {
    own_folder "$1"
    find "$1/" -mindepth 1 -maxdepth 1 ! -name .made-by-seq1f1b -exec rm -rf -- {} +
}

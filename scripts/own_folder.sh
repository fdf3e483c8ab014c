# shellcheck shell=bash
# Sourced by scripts that empty or overwrite folders: they do so only in those that they made.

# own_folder FOLDER: make FOLDER and mark it as made by a script. One that is there has to bear the mark, or be empty.
own_folder() {
    local mark=$1/.made-by-seq1f1b
    if [ -e "$1" ] && [ ! -e "$mark" ] && { [ ! -d "$1" ] || [ -n "$(ls -A -- "$1")" ]; }; then
        echo "error: $1 exists and was not made by $0, which would overwrite what is in it: remove it, or name another." >&2
        exit 1
    fi
    mkdir -p -- "$1"
    touch -- "$mark"
}

# What a developer does every day. `just` lists it.

_default:
    @just --list

# Build the three programs as they are shipped
build:
    install/build

# Formatting, lints and the walls between the rooms
lint:
    cargo fmt --all --check
    cargo clippy --workspace --all-targets -- -D warnings
    shellcheck -x install/try-it install/install tests/run tests/engines/prepare .ci/run

# Everything that needs neither root nor an engine
test-quick:
    cargo test --lib --test rooms

# Everything, on real engines (root; installs what is missing)
test:
    ./tests/run

# Licences, advisories and where crates come from
deny:
    cargo deny check

# What oci-mps-runtime adds to runc create, in one paired run
bench: build
    cargo bench --bench create

# Show a container before and after, on whatever is here
try:
    ./install/try-it

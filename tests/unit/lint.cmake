# Sizes of functions, files and the tracked tree; the other checks of scripts/lint need tools that not every builder has.
find_program(EPX_PYTHON3 NAMES python3 REQUIRED)
add_test(NAME lint_sizes COMMAND ${EPX_PYTHON3} ${PROJECT_SOURCE_DIR}/scripts/check-size)
set_tests_properties(lint_sizes PROPERTIES TIMEOUT 60 LABELS lint)

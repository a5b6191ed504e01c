epx_add_test(NAME unit_sha256 SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/sha256_test.c LIBS epx_static LABELS unit)
epx_add_test(NAME unit_boot_env SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/boot_env_test.c LIBS epx_static LABELS unit)

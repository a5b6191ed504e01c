epx_add_test(NAME unit_ops_reference SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/ops_reference_test.c LIBS epx_engine LABELS unit)
epx_add_test(NAME unit_ops_row_rule SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/ops_row_rule_test.c LIBS epx_engine LABELS unit)
epx_add_test(NAME unit_ops_kinds SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/ops_kinds_test.c LIBS epx_engine LABELS unit)
epx_add_test(NAME unit_ops_pool SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/ops_pool_test.c LIBS epx_engine LABELS unit)

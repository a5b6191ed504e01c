# The front's processes: without a model (fake_rank.c instead of the engine), with real ranks, and the program from outside.
set(front_dir ${CMAKE_CURRENT_SOURCE_DIR})
epx_add_test(NAME front_fake SOURCES ${front_dir}/front_fake_test.c ${front_dir}/front_util.c ${front_dir}/fake_rank.c
  $<TARGET_OBJECTS:epx_front> LIBS epx_static LABELS server tsan TIMEOUT 120)
epx_add_test(NAME front_model SOURCES ${front_dir}/front_model_test.c ${front_dir}/front_util.c
  LIBS epx_server epx_engine epx_static LABELS server TIMEOUT 240)
add_dependencies(front_model epx_reference_models)
find_package(Python3 REQUIRED COMPONENTS Interpreter)
add_test(NAME front_cli COMMAND ${Python3_EXECUTABLE} ${front_dir}/front_cli.py $<TARGET_FILE:epx> ${PROJECT_SOURCE_DIR} ${EPX_REFERENCE_DIR})
set_tests_properties(front_cli PROPERTIES TIMEOUT 300 LABELS server)
# Hours of serving in seconds here, EPX_SOAK_SECONDS in `make soak`.
epx_add_test(NAME server_soak SOURCES ${front_dir}/soak_test.c ${front_dir}/front_util.c
  LIBS epx_server epx_engine epx_static LABELS server TIMEOUT 120 ARGS 4)
add_test(NAME soak_serving COMMAND server_soak 1800)
set_tests_properties(soak_serving PROPERTIES TIMEOUT 90000 LABELS soak)

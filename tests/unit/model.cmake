if(TARGET epx_engine)
  epx_add_test(NAME unit_model_load SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/model_load_test.c LIBS epx_engine LABELS unit)
  epx_add_test(NAME unit_model_config SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/model_config_test.c LIBS epx_engine LABELS unit)
endif()
